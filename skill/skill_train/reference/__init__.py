"""The reference model that files are compared with, in fp32 through transformers and PEFT."""
