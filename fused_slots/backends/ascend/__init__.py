"""Block tables on Ascend NPUs: operations, the device that runs them, plans, staged rows."""
