"""What a run showed: plots, the HTML report, the audit, the explanation of one batch, the comparison of runs.

Everything here reads a run folder that services have written; nothing here is needed while a run works. Only facts of
the folder are reported: what is missing is said to be missing.
"""
