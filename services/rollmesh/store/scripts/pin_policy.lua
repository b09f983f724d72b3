#!lua flags=allow-oom
-- Pins generators to a policy version. ARGV: version, '' to unpin; owner, '' for the operator, who overrides every pin,
-- else an evaluation, which overrides no other owner and removes only its own pin; instance, one generator or '' for all.
-- Returns the number of an operator's setting, else 0.
local version, owner, instance = ARGV[1], ARGV[2], ARGV[3]
local pin = call('HMGET', K.meta, 'pinned', 'pin_owner')
local foreign = owner ~= '' and pin[1] and pin[2] ~= owner
if version ~= '' and call('HEXISTS', K.versions, version) == 0 then
  fail('CONFLICT', 'policy version ' .. version .. ' has not been announced')
end
if version ~= '' and foreign and pin[1] ~= version then
  local by = (pin[2] or '') == '' and 'an operator' or pin[2]
  fail('CONFLICT', 'policy version ' .. pin[1] .. ' is pinned by ' .. by)
end
if foreign then return 0 end
if owner == '' and instance == '' then return new_setting('pin', version) end
if version == '' then
  call('HDEL', K.meta, 'pinned', 'pin_owner', 'pin_instance')
else
  call('HSET', K.meta, 'pinned', version, 'pin_owner', owner, 'pin_instance', instance)
end
return 0
