"""What a run needs to resume: counters (progress), tensors on disk (store, reading), background saving."""
