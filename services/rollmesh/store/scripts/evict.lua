#!lua flags=allow-oom
-- Drops open and ready groups, and groups that were set aside; the history counts each as a group of its prompt.
-- ARGV: leader, reason, group ids. Returns the number of dropped groups.
require_leader(ARGV[1])
refuse_while_recovering('evict')
local dropped = 0
for at = 3, #ARGV do
  local gid = ARGV[at]
  if not call('HGET', K.cut, gid) and not call('ZSCORE', K.tombstones, gid) then
    local group = load_group(gid)
    local resetting = not group and call('HGET', K.returning, gid)
    -- The outcome of a ready group has been noted.
    if (group or resetting) and not call('ZSCORE', K.ready, gid) then
      note_outcome(group or cjson.decode(resetting), true)
    end
    if group then drop_group(group, ARGV[2]) end
    if group or drop_returning(gid, ARGV[2]) then dropped = dropped + 1 end
  end
end
count('evicted_total', dropped)
flush_counts()
return dropped
