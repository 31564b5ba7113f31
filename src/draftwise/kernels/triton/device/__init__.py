"""What runs on the device: functions for Triton's compiler, or its interpreter. Launched from the modules one up."""
