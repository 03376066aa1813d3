"""The kernels in the forms that lower well on Ascend; docs/ascend.md says which those are."""
