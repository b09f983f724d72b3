-- The version rises with every record that is written or removed, and with the clock, so that a Redis that came back with
-- an earlier state never repeats a version.
local function next_registry_version()
  local version = integer(math.max(tonumber(call('HGET', K.desired, 'registry_version') or '0') + 1, now()))
  call('HSET', K.desired, 'registry_version', version)
  return version
end

local function remove_generators(ids)
  for _, id in ipairs(ids) do call('HDEL', K.generators, id) end
  for _, key in ipairs({K.generator_expiry, K.generator_changes}) do call('ZREM', key, unpack(ids)) end
end
