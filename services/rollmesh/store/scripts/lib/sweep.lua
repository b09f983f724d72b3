-- Deletes the records of a range of groups of a confirmed batch: their batch file has them, and Redis still records that
-- they are cut. Returns the number of groups in the batch, 0 without a confirmed batch.
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
