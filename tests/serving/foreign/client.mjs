// Posts a body in each way that Node has, and prints a status and an answer a line.
import http from 'node:http'

const [address, body] = process.argv.slice(2)
const headers = { 'content-type': 'application/json' }

const post = (options, write) =>
  new Promise((resolve, reject) => {
    const request = http.request(address, { method: 'POST', ...options }, (response) => {
      let text = ''
      response.setEncoding('utf8').on('data', (part) => (text += part))
      response.on('end', () => resolve(console.log(response.statusCode, text)))
    })
    request.on('error', reject)
    write(request)
  })

const size = Buffer.byteLength(body)
await post({ headers: { ...headers, 'content-length': size } }, (request) => request.end(body))
await post({ headers }, (request) => request.write(body, () => request.end())) // in chunks
await post({ headers: { ...headers, expect: '100-continue', 'content-length': size } }, (request) =>
  request.on('continue', () => request.end(body)),
)
await post({ headers, agent: new http.Agent({ keepAlive: true }) }, (request) => request.end(body))
if (globalThis.fetch) {
  const response = await fetch(address, { method: 'POST', headers, body })
  console.log(response.status, await response.text())
}
process.exit(0)
