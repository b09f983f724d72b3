-- Deletes the records of some groups of a confirmed batch: from here on their batch file has them, and Redis knows that
-- they are cut. Returns the number of groups in the batch, 0 without a confirmed one.
local function sweep_groups(step, first, last)
  if not call('HGET', batch_key(step), 'digest') then return 0 end
  for _, gid in ipairs(call('LRANGE', batch_groups_key(step), first, last)) do
    local group = load_group(gid)
    if group then delete_group(group, '') end
  end
  local size = call('LLEN', batch_groups_key(step))
  if last >= size - 1 then
    call('SREM', K.unswept, step)
    if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then
      call('UNLINK', batch_key(step), batch_groups_key(step))
    end
  end
  return size
end
