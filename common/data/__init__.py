"""Files and hub data sets -> rows -> token ids with loss masks -> packed micro-batches."""
