"""The contracts between data, families, engines and objectives."""
