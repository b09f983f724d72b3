-- A setting is "number value" under its name: pause (1|0), hold (1|0: the launcher's pause), pin (version or ''),
-- rollback ("request version" or ''), scale:<service> (replicas or ''). The number only rises, and with the clock, so a
-- setting that Redis has lost is older than any setting written afterwards.
local function setting_number(name)
  return tonumber(string.match(call('HGET', K.settings, name) or '', '^%d+') or '0')
end

local function set_or_delete(key, field, value)
  if value == '' then call('HDEL', key, field) else call('HSET', key, field, value) end
end

local function write_setting(name, number, value)
  call('HSET', K.settings, name, integer(number) .. ' ' .. value)
  if name == 'pause' or name == 'hold' then call('HSET', K.meta, 'resumed_at', integer(now())) end
  if name == 'pause' then
    call('HSET', K.meta, 'user_paused', value)
  elseif name == 'hold' then
    call('HSET', K.meta, 'launcher_paused', value)
  elseif name == 'pin' then
    call('HDEL', K.meta, 'pinned', 'pin_owner', 'pin_instance')
    if value ~= '' then call('HSET', K.meta, 'pinned', value, 'pin_owner', '', 'pin_instance', '') end
  elseif name == 'rollback' then
    local id, version = string.match(value, '^(%S+) (%S+)$')
    set_or_delete(K.meta, 'rollback_id', id or '')
    set_or_delete(K.meta, 'rollback_version', version or '')
  else
    set_or_delete(K.scale, string.match(name, '^scale:(.+)$'), value)
  end
end

-- Returns the number of the setting.
local function new_setting(name, value)
  local number = math.max(setting_number(name) + 1, now())
  write_setting(name, number, value)
  return integer(number)
end
