"""Pictures from a loaded pipeline (`generate`), and many of them on one sheet (`grid`)."""
