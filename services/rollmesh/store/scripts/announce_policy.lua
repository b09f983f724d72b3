#!lua flags=allow-oom
-- Registers a published policy. ARGV: trainer, version, train step, path, manifest digest. Returns 0 for a repeat.
require_trainer(ARGV[1])
local version = tonumber(ARGV[2])
local highest = tonumber(call('HGET', K.meta, 'policy_version'))
if version <= highest then
  local entry = call('XRANGE', K.policies, (version + 1) .. '-0', (version + 1) .. '-0')[1]
  if entry and entry[2][4] == ARGV[3] and entry[2][6] == ARGV[4] and entry[2][8] == ARGV[5] then return 0 end
  fail('CONFLICT', 'policy version ' .. version .. ' exists already; the next one is ' .. (highest + 1))
end
if version ~= highest + 1 then
  fail('CONFLICT', 'policy version ' .. version .. ': the next one is ' .. (highest + 1))
end
add_policy(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
note_announced()
return 1
