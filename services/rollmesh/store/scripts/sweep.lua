#!lua flags=allow-oom
-- Deletes the records of some groups of a confirmed batch. ARGV: train step, first, last. Returns the groups in the batch.
local size = sweep_groups(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
flush_counts()
return size
