#!lua flags=allow-oom
-- uses: roles group
-- Drops a slice of the unclaimed groups, oldest first. ARGV: trainer, slice size, newest admission index to drop.
-- Returns how many were dropped; 0 means that none is left.
require_trainer(ARGV[1])
local dropped = 0
for _, queue in ipairs({K.open, K.ready}) do
  for _, gid in ipairs(call('ZRANGE', queue, '-inf', ARGV[3], 'BYSCORE', 'LIMIT', 0, tonumber(ARGV[2]) - dropped)) do
    drop_group(load_group(gid), 'rolled_back')
    dropped = dropped + 1
  end
  if dropped >= tonumber(ARGV[2]) then break end
end
flush_counts()
return dropped
