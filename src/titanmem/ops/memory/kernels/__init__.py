"""The memory operation as Triton kernels, forward and backward; docs/architecture.md says how they divide the work.

    gate_rows → write_chunks → read_chunks                              forward
    the same again, then read_chunks_*_backward → write_chunks_backward → gate_rows_backward

Nothing but the inputs is kept for the backward pass. `support.why_not` says why a call has to take the chunked form.
"""
