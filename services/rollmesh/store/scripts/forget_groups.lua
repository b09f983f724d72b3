#!lua flags=allow-oom
-- Deletes the records of re-asserted groups, which are in their batch file. ARGV: trainer, group ids of this slice.
-- Returns the number of groups that had records.
require_trainer(ARGV[1])
local deleted = 0
for at = 2, #ARGV do
  local gid = ARGV[at]
  local claimed = call('HGET', K.cut, gid) or call('ZSCORE', K.tombstones, gid)
  local group = claimed and load_group(gid)
  if group then
    delete_group(group, '')
    -- A late score may have made the group ready again, or ended its round.
    for _, queue in ipairs({K.open, K.ready, K.open_steps, K.ready_steps, K.ready_tokens, K.undecided}) do
      call('ZREM', queue, gid)
    end
  end
  if group or (claimed and drop_returning(gid, '')) then deleted = deleted + 1 end
end
flush_counts()
return deleted
