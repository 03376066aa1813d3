"""How the recordings that ship are made: vLLM's own scheduler, driven without a GPU."""
