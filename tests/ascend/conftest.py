"""These tests need an environment of their own (see requirements.txt); elsewhere none is found."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ascendnpuir") else ["test_*.py"]
