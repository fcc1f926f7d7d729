"""The reference model, with which files are compared. It runs in fp32 through transformers and PEFT."""
