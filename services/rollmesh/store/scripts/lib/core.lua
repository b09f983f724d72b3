local call = redis.call

local function fail(code, text)
  error({err = code .. ' ' .. text})
end

local clock
local function now()
  if not clock then
    local time = call('TIME')
    clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return clock
end

-- A whole number as text; tostring writes large numbers as 1.7e+12.
local function integer(number)
  return string.format('%d', number)
end
