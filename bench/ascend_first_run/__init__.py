"""The first hour on an Ascend NPU: what nobody without one can know.

    python -m bench.ascend_first_run            # on npu:0; ascend_first_run.json grows part by part
    python -m bench.ascend_first_run send       # the result in one archive, and where to send it
    python -m bench.ascend_first_run tables     # the result as tables for docs/evidence/ascend.md
    python -m bench.ascend_first_run --dry-run  # what a CPU can do of it

Each part is a process of its own with a time limit: one that hangs is ended and the next begins.
Correctness comes first, then latencies, our kernels and vllm-ascend's. Needs the source tree, since
the oracles are among the tests. docs/ascend.md says which assumption each part tests.
"""
