-- Every operation of the store that reads and then writes (redis_store.py says what the keys hold).
--
-- A call gives the prefix of all keys as its key, and the name of a function below as its last argument.
local p = KEYS[1]
local num_args = #ARGV - 1
local operations = {}

local function fenced(fence)
  return fence ~= '' and tonumber(fence) ~= tonumber(redis.call('HGET', p..':lease', 'number') or 0)
end

-- Files

local function add_file(id, owner, bytes, expires_at, record)
  redis.call('HDEL', p..':begun', id)
  if redis.call('HSETNX', p..':files', id, record) == 0 then return end
  redis.call('ZADD', p..':files:'..owner, redis.call('INCR', p..':numbers'), id)
  redis.call('HINCRBY', p..':bytes', owner, bytes)
  if expires_at ~= '' then redis.call('ZADD', p..':expiry', expires_at, id) end
end

-- What the results of an owner's open jobs take.
local function growing(owner)
  local size = 0
  for _, id in ipairs(redis.call('HKEYS', p..':growing')) do
    if redis.call('ZSCORE', p..':jobs:'..owner, id) and redis.call('ZSCORE', p..':open', id) then
      size = size + redis.call('HGET', p..':growing', id)
    end
  end
  return size
end

function operations.growing()
  return tostring(growing(ARGV[1]))
end

function operations.add_file()
  local id, owner, bytes, most_files, most_bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[6]), tonumber(ARGV[7])
  if most_files and redis.call('HEXISTS', p..':files', id) == 0 then
    local files, size = redis.call('ZCARD', p..':files:'..owner), redis.call('HGET', p..':bytes', owner)
    local all = tonumber(size or 0) + growing(owner) + tonumber(bytes)
    if files >= most_files or all > most_bytes then return 'over' end
  end
  add_file(id, owner, bytes, ARGV[4], ARGV[5])
  return 'done'
end

function operations.remove_file()
  local id, owner, bytes = ARGV[1], ARGV[2], ARGV[3]
  if redis.call('HDEL', p..':files', id) == 0 then return 'gone' end
  redis.call('ZREM', p..':files:'..owner, id)
  redis.call('ZREM', p..':expiry', id)
  redis.call('HINCRBY', p..':bytes', owner, -bytes)
  redis.call('HSET', p..':begun', id, '[0, "", 0]')  -- as if begun long ago, so that any process may sweep it
  return 'done'
end

-- Jobs and lines

function operations.add_job()
  local id, owner, record, most_open = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
  if redis.call('HEXISTS', p..':jobs', id) == 1 then return 'done' end
  if most_open and tonumber(redis.call('HGET', p..':open_of', owner) or 0) >= most_open then return 'over' end
  redis.call('HSET', p..':jobs', id, record)
  local number = redis.call('INCR', p..':numbers')
  redis.call('HSET', p..':revisions', id, 0)
  redis.call('ZADD', p..':jobs:'..owner, number, id)
  redis.call('ZADD', p..':open', number, id)
  redis.call('HINCRBY', p..':open_of', owner, 1)
  return 'done'
end

function operations.save_job()
  local fence, id, owner, revision, is_open, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
  local kept_until = ARGV[7]
  if redis.call('HGET', p..':jobs', id) == record then return 'done' end
  if fenced(fence) then return 'fenced' end
  if redis.call('HGET', p..':revisions', id) ~= revision then return 'conflict' end
  redis.call('HSET', p..':jobs', id, record)
  redis.call('HINCRBY', p..':revisions', id, 1)
  if is_open == '0' and redis.call('ZREM', p..':open', id) == 1 then
    redis.call('HINCRBY', p..':open_of', owner, -1)
    redis.call('DEL', p..':results:'..id, p..':counts:'..id, p..':costs:'..id)
    redis.call('HDEL', p..':forecasts', id)
    redis.call('HDEL', p..':growing', id)
  end
  if kept_until ~= '' then redis.call('ZADD', p..':ended', kept_until, id) end
  for at = 8, num_args, 4 do add_file(ARGV[at], owner, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]) end
  return 'done'
end

function operations.forget_job()
  local id, owner = ARGV[1], ARGV[2]
  redis.call('HDEL', p..':jobs', id)
  redis.call('HDEL', p..':revisions', id)
  redis.call('ZREM', p..':jobs:'..owner, id)
  redis.call('ZREM', p..':ended', id)
  return 'done'
end

function operations.open_jobs()
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', p..':open', 0, -1)) do
    if redis.call('ZSCORE', p..':jobs:'..ARGV[1], id) then found[#found + 1] = id end
  end
  return table.concat(found, ' ')
end

function operations.add_results()
  local fence, job, new = ARGV[1], ARGV[2], 0
  if fenced(fence) then return 'fenced' end
  if not redis.call('ZSCORE', p..':open', job) then return '0' end  -- Redis has forgotten it: nobody would remove them
  for at = 3, num_args, 11 do
    if redis.call('HSETNX', p..':results:'..job, ARGV[at], ARGV[at + 1]) == 1 then
      new = new + 1
      redis.call('HINCRBY', p..':growing', job, #ARGV[at + 1])
      for offset, name in ipairs({
        'completed', 'failed', 'input_tokens', 'cached_tokens', 'output_tokens', 'reasoning_tokens',
        'device_us', 'millijoules', 'modelled_mj'
      }) do
        local sums = offset > 6 and ':costs:' or ':counts:' -- the version before reads all that is in counts
        redis.call('HINCRBY', p..sums..job, name, ARGV[at + 1 + offset])
      end
    end
  end
  return tostring(new)
end

-- Responses

local function forget_response(id, owner)
  if redis.call('HDEL', p..':responses', id) == 0 then return 'gone' end
  redis.call('HINCRBY', p..':response_bytes', owner, -redis.call('HGET', p..':response_sizes', id))
  redis.call('HDEL', p..':response_sizes', id)
  redis.call('ZREM', p..':responses:'..owner, id)
  redis.call('ZREM', p..':response_expiry', id)
  return 'done'
end

function operations.add_response()
  local id, owner, record, size, expires_at, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
  if redis.call('HSETNX', p..':responses', id, record) == 0 then return 'done' end
  redis.call('HSET', p..':response_sizes', id, size)
  redis.call('ZADD', p..':responses:'..owner, redis.call('INCR', p..':numbers'), id)
  redis.call('ZADD', p..':response_expiry', expires_at, id)
  local all = redis.call('HINCRBY', p..':response_bytes', owner, size)
  while all > most do
    local oldest = redis.call('ZRANGE', p..':responses:'..owner, 0, 0)[1]
    if not oldest then break end
    forget_response(oldest, owner)
    all = tonumber(redis.call('HGET', p..':response_bytes', owner))
  end
  return 'done'
end

function operations.save_response()
  local id, owner, record, size = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  if redis.call('HEXISTS', p..':responses', id) == 0 then return 'gone' end
  redis.call('HSET', p..':responses', id, record)
  redis.call('HINCRBY', p..':response_bytes', owner, size - redis.call('HGET', p..':response_sizes', id))
  redis.call('HSET', p..':response_sizes', id, size)
  return 'done'
end

function operations.forget_response()
  return forget_response(ARGV[1], ARGV[2])
end

function operations.forget_expired()
  local expired = redis.call('ZRANGEBYSCORE', p..':response_expiry', '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
  for _, id in ipairs(expired) do
    local record = redis.call('HGET', p..':responses', id)
    -- The owner stands in front: a record may have megabytes, and nobody reads on.
    forget_response(id, string.match(record, '^{"id":"[^"]*","owner":"([^"\\]*)"') or cjson.decode(record).owner)
  end
  return #expired == tonumber(ARGV[2]) and 'more' or 'done'
end

-- The lease

function operations.lease()
  local name, life, for_ms, model, keys = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local has = redis.call('HMGET', p..':lease', 'number', 'holder', 'life', 'until')
  local number, till = tonumber(has[1] or 0), tonumber(has[4] or 0)
  local is_held = has[2] and has[2] ~= name and till > now and till <= now + for_ms  -- later: the clock was set back
  if is_held then return '' end
  if has[2] ~= name or has[3] ~= life then number = number + 1 end
  redis.call('HSET', p..':lease', 'number', number, 'holder', name, 'life', life, 'until', now + for_ms)
  redis.call('HSET', p..':lease', 'model', model, 'keys', keys)
  return tostring(number)
end

function operations.release()
  local has = redis.call('HMGET', p..':lease', 'holder', 'life')
  if has[1] == ARGV[1] and has[2] == ARGV[2] then redis.call('HDEL', p..':lease', 'holder', 'life', 'until') end
  return 'done'
end

return operations[ARGV[#ARGV]]()
