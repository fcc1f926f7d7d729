"""The model that files are judged by, in fp32 through transformers and PEFT."""
