"""Whether a plan is as right at other sizes as at that of the samples it was searched on."""
