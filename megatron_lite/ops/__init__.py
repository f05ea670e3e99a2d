"""Local tensor maths: plain torch truths, vendor kernels, and one table that selects."""
