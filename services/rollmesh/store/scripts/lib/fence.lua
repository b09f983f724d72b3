-- A server that came back with another run_id may have an earlier state. The first fenced script that reads the new
-- run_id opens a recovery. A clean stop, announced before the shutdown, needs no recovery.
local function server_run_id()
  local info = call('INFO', 'server')
  local _, before = string.find(info, 'run_id:', 1, true)
  return string.sub(info, before + 1, before + 40)
end

local function ttl_ms()
  return tonumber(call('HGET', K.limits, 'session_ttl_ms') or '30000')
end

-- A time of the run's record, at most `latest`. A later time was written before the clock of the host was set back. It is
-- replaced by `latest`, because its waiters would wait longer by the size of the clock change.
local function recorded_time(field, value, latest)
  local time = tonumber(value or '0')
  if time <= latest then return time end
  call('HSET', K.meta, field, latest)
  return latest
end

local function open_recovery(run_id)
  call('HSET', K.meta, 'run_id', run_id, 'recovering_until', now() + ttl_ms(), 'reasserted', '0')
  call('HDEL', K.meta, 'clean')
  call('HINCRBY', K.counts, 'recoveries', 1)
end

local function unknown_run()
  fail('RUN_UNKNOWN', 'the run has not been initialised (init_run), or Redis came back empty')
end

local function require_run()
  if not call('HGET', K.meta, 'run_id') then unknown_run() end
end

-- True while nothing may be admitted, leased, cut or reaped.
local function recovering()
  local run_id = server_run_id()
  local meta = call('HMGET', K.meta, 'run_id', 'recovering_until', 'trainer', 'reasserted', 'clean')
  if not meta[1] then unknown_run() end
  if meta[1] ~= run_id then
    if not meta[5] then
      open_recovery(run_id)
      return true
    end
    call('HSET', K.meta, 'run_id', run_id)
  end
  -- A client has called after the announced stop, so a later crash is not a clean stop. Nor does a clean stop end the
  -- recovery in progress.
  if meta[5] then call('HDEL', K.meta, 'clean') end
  if not meta[2] then return false end
  local ends = recorded_time('recovering_until', meta[2], now() + ttl_ms())
  if now() < ends or (meta[3] and meta[4] ~= '1') then return true end
  call('HDEL', K.meta, 'recovering_until')
  call('HSET', K.meta, 'quiet_until', now() + ttl_ms())
  return false
end

local function refuse_while_recovering(what)
  if recovering() then
    fail('RECOVERING', what .. ': Redis came back as another server and is being re-registered')
  end
end
