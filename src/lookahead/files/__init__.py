"""Files that are read and written: GGUF models, and the records of a run."""
