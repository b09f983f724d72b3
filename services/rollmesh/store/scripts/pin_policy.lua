#!lua flags=allow-oom
-- ARGV: version, or '' to unpin.
if ARGV[1] == '' then
  call('HDEL', K.meta, 'pinned')
elseif call('HEXISTS', K.versions, ARGV[1]) == 0 then
  fail('CONFLICT', 'policy version ' .. ARGV[1] .. ' has not been announced')
else
  call('HSET', K.meta, 'pinned', ARGV[1])
end
return 1
