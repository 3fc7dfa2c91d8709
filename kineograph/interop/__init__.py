"""What others wrote, in and out: diffusers folders, LoRA files, SAT weights and configs, plain safetensors."""
