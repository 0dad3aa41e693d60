"""What training costs, in numbers: GPU and host memory, disk, FLOPs and device peaks. Pure arithmetic."""
