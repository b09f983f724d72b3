#!lua flags=allow-oom
-- Closes a session and releases a slice of its trajectories. ARGV: session, slice size, '1' when attempts do not count.
-- Returns the number of released trajectories; 0 means that none is left.
if call('ZREM', K.sessions, ARGV[1]) == 1 then call('SADD', K.closing, ARGV[1]) end
set_waiting(ARGV[1], 0)
local ids = call('SRANDMEMBER', held_key(ARGV[1]), ARGV[2])
for _, id in ipairs(ids) do give_back(id, ARGV[3] == '1') end
if #ids > 0 then call('SREM', held_key(ARGV[1]), unpack(ids)) end
if call('SCARD', held_key(ARGV[1])) == 0 then
  call('SREM', K.closing, ARGV[1])
  call('UNLINK', session_key(ARGV[1]))
  local claims = call('HGETALL', K.evaluation_claims)
  for at = 1, #claims, 2 do
    if claims[at + 1] == ARGV[1] then
      call('HDEL', K.evaluation_claims, claims[at])
      call('ZADD', K.evaluation_queue, call('HGET', evaluation_key(claims[at]), 'order'), claims[at])
    end
  end
end
flush_counts()
return #ids
