"""The command line: one file a command. torch is loaded by the workers alone, pydantic where a file is read."""
