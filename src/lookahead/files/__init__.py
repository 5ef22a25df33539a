"""Reading and writing files: GGUF models, and the records of a run."""
