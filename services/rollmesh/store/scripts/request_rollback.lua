#!lua flags=allow-oom
-- Asks the trainer to continue from an older policy. ARGV: new id, version. A newer request replaces an older one.
-- Returns the number of the setting.
if call('HEXISTS', K.versions, ARGV[2]) == 0 then
  fail('CONFLICT', 'policy version ' .. ARGV[2] .. ' has not been announced')
end
return new_setting('rollback', ARGV[1] .. ' ' .. ARGV[2])
