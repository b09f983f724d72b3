#!lua flags=allow-oom
-- Confirms that a batch file is on disk and deletes the payloads of the first groups; sweep deletes the others.
-- ARGV: trainer, train step, digest, groups of this call, group ids. Returns the number of groups in the batch, 0 when
-- the batch is deleted.
require_trainer(ARGV[1])
local step, digest = ARGV[2], ARGV[3]
local there = call('HGET', batch_key(step), 'digest')
if there ~= digest and tonumber(step) > tonumber(call('HGET', K.meta, 'trained_step')) then
  if not there then
    local gids = call('LRANGE', batch_groups_key(step), 0, -1)
    if #gids == 0 then fail('CONFLICT', 'batch ' .. step .. ' has not been cut') end
    if table.concat(gids, ' ') ~= table.concat({unpack(ARGV, 5)}, ' ') then
      fail('CONFLICT', 'batch ' .. step .. ' has been cut with other groups since it was claimed')
    end
  elseif there ~= 'unknown' then
    fail('CONFLICT', 'batch ' .. step .. ' was confirmed with another digest')
  end
  if not there then call('SADD', K.unswept, step) end
  call('HSET', batch_key(step), 'digest', digest)
end
local size = sweep_groups(step, 0, tonumber(ARGV[4]) - 1)
flush_counts()
return size
