#!lua flags=allow-oom
-- Asks the trainer to go on from an older policy. ARGV: fresh id, version. A newer request replaces an older one.
if call('HEXISTS', K.versions, ARGV[2]) == 0 then
  fail('CONFLICT', 'policy version ' .. ARGV[2] .. ' has not been announced')
end
call('HSET', K.meta, 'rollback_id', ARGV[1], 'rollback_version', ARGV[2])
return 1
