#!lua flags=allow-oom
-- uses: group
-- Deletes the records of confirmed groups: from here on their batch file has them, and Redis knows that they are cut.
-- ARGV: train step, first, last. Returns the number of groups in the batch.
local step, last = ARGV[1], tonumber(ARGV[3])
if not call('HGET', batch_key(step), 'digest') then return 0 end
for _, gid in ipairs(call('LRANGE', batch_groups_key(step), ARGV[2], last)) do
  local group = load_group(gid)
  if group then
    delete_members(group)
    call('UNLINK', group_key(gid))
  end
end
local size = call('LLEN', batch_groups_key(step))
if last >= size - 1 then
  call('SREM', K.unswept, step)
  if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then
    call('UNLINK', batch_key(step), batch_groups_key(step))
  end
end
flush_counts()
return size
