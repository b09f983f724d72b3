#!lua flags=allow-oom
-- uses: group
-- Deletes the payload of confirmed groups and, once trained, what is left of them. ARGV: train step, first, last.
-- Returns the number of groups in the batch.
local step, first, last = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not call('HGET', batch_key(step), 'digest') then return 0 end
local trained = tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step'))
local size = call('LLEN', batch_groups_key(step))
for _, gid in ipairs(call('LRANGE', batch_groups_key(step), first, last)) do
  local group = load_group(gid)
  if group and group.launched > 0 then
    delete_members(group)
    call('HSET', group_key(gid), 'launched', 0)
  end
  if group and trained then call('UNLINK', group_key(gid)) end
end
if last >= size - 1 then
  call('SREM', K.unswept, step)
  if trained then call('UNLINK', batch_key(step), batch_groups_key(step)) end
end
flush_counts()
return size
