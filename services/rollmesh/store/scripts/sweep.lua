#!lua flags=allow-oom
-- Deletes the records of a range of groups of a confirmed batch. ARGV: train step, first, last. Returns the number of
-- groups in the batch.
local size = sweep_groups(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
flush_counts()
return size
