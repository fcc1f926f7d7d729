"""Whether llama.cpp's converter makes a right GGUF file of a model, told before the training."""
