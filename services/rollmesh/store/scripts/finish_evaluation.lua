#!lua flags=allow-oom
-- Records the result of an evaluation; the first result of its holder counts. ARGV: session, id, result (JSON).
local result = call('HGET', evaluation_key(ARGV[2]), 'result')
if result then
  if result == ARGV[3] then return 0 end
  fail('CONFLICT', 'evaluation ' .. ARGV[2] .. ' has another result already')
end
if call('HGET', K.evaluation_claims, ARGV[2]) ~= ARGV[1] then
  fail('SESSION_LOST', 'evaluation ' .. ARGV[2] .. ' is held by another session')
end
call('HDEL', K.evaluation_claims, ARGV[2])
call('HSET', evaluation_key(ARGV[2]), 'result', ARGV[3], 'finish_time', now())
return 1
