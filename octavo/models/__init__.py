"""Models: one dense decoder for Llama 3, Qwen2 / 2.5 and Qwen3; Hugging Face folders in and out."""
