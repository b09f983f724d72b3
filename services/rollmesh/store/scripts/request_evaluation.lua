#!lua flags=allow-oom
-- Queues an evaluation once. ARGV: id, request (JSON). The run may be idle until the evaluation is finished, and an idle
-- mesh frees no memory, so this script must run when memory is short.
if call('EXISTS', evaluation_key(ARGV[1])) == 1 then
  if call('HGET', evaluation_key(ARGV[1]), 'request') == ARGV[2] then return 0 end
  fail('CONFLICT', 'evaluation ' .. ARGV[1] .. ' was requested with other options')
end
call('HSET', evaluation_key(ARGV[1]), 'request', ARGV[2], 'order', now(), 'time', now())
call('ZADD', K.evaluations, now(), ARGV[1])
call('ZADD', K.evaluation_queue, now(), ARGV[1])
return 1
