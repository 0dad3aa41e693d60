"""Estimates of GPU and host memory, disk space and FLOPs, and the peaks of known devices. Pure arithmetic."""
