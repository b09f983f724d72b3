#!lua flags=allow-oom
-- uses: roles
-- The batch file is on disk: payloads may go (sweep). ARGV: trainer, train step, digest, group ids.
require_trainer(ARGV[1])
local step = ARGV[2]
if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then return 0 end
local there = call('HGET', batch_key(step), 'digest')
if there == ARGV[3] then return 0 end
if there == 'unknown' then
  call('HSET', batch_key(step), 'digest', ARGV[3])
  return 0
end
if there then fail('CONFLICT', 'batch ' .. step .. ' was confirmed with another digest') end
local gids = call('LRANGE', batch_groups_key(step), 0, -1)
if #gids == 0 then fail('CONFLICT', 'batch ' .. step .. ' has not been cut') end
if table.concat(gids, ' ') ~= table.concat({unpack(ARGV, 4)}, ' ') then
  fail('CONFLICT', 'batch ' .. step .. ' has been cut with other groups since it was claimed')
end
call('HSET', batch_key(step), 'digest', ARGV[3])
call('SADD', K.unswept, step)
return 1
