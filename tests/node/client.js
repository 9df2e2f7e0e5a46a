// A router in 100 lines, from the .proto alone: decodes greedily with a worker, and prints what it got as JSON.
//
//   node client.js PROTO ADDRESS TOKEN_IDS NUM_TOKENS        e.g.   node client.js ../../proto/model_worker.proto 127.0.0.1:50051 1,2,3 16

"use strict";

const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

// 64-bit numbers (epochs, ids) don't fit into JavaScript's: they travel through the program as text.
const definition = { longs: String, enums: String, defaults: true, oneofs: true };
const routerId = "9007199254740993"; // 2^53 + 1: a router that took it for a number would name another one.
const firstBlock = 1; // Block 0 is the null block.

function connect(protoFile, address) {
  const { modelworker } = grpc.loadPackageDefinition(protoLoader.loadSync(protoFile, definition));
  const client = new modelworker.v1.ModelWorker(address, grpc.credentials.createInsecure());
  const call = (method, request) =>
    new Promise((resolve, reject) => {
      const deadline = new Date(Date.now() + 30_000);
      client[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  return { call, close: () => client.close() };
}

// One sequence in blocks 1, 2, 3 ...: the step that computes `tokenIds` after `contextLen` cached tokens.
function step(info, stepId, contextLen, tokenIds) {
  const numBlocks = Math.ceil((contextLen + tokenIds.length) / info.kvCache.blockSize);
  return {
    workerEpoch: info.workerEpoch,
    routerId,
    stepId: String(stepId),
    queryLens: [tokenIds.length],
    contextLens: [contextLen],
    tokenIds,
    blockCounts: [numBlocks],
    blockIds: Array.from({ length: numBlocks }, (_, index) => firstBlock + index),
  };
}

async function decode(call, info, promptIds, numTokens) {
  const outputIds = [];
  let contextLen = 0;
  let tokenIds = promptIds;
  let stepId = BigInt(info.nextStepId);
  let request, answer;
  while (outputIds.length < numTokens) {
    request = step(info, stepId, contextLen, tokenIds);
    answer = await call("ExecuteStep", request);
    if (answer.sequenceErrors.length) throw new Error(JSON.stringify(answer.sequenceErrors));
    contextLen += tokenIds.length;
    tokenIds = answer.sampledIds;
    outputIds.push(...tokenIds);
    stepId += 1n;
  }
  return { outputIds, request, answer };
}

// What the worker says to a token that its model does not have.
async function refusal(call, info) {
  const request = { ...step(info, 0, 0, [info.model.vocabSize]), workerEpoch: "0", routerId: "0" };
  try {
    await call("ExecuteStep", request);
  } catch (error) {
    return { code: grpc.status[error.code], details: error.details };
  }
  throw new Error("a token id outside the vocabulary was executed");
}

async function main([protoFile, address, promptIds, numTokens]) {
  const { call, close } = connect(protoFile, address);
  try {
    const info = await call("GetWorkerInfo", {});
    const invalid = await refusal(call, info);
    const { outputIds, request, answer } = await decode(call, info, promptIds.split(",").map(Number), Number(numTokens));
    const retried = await call("ExecuteStep", request);
    const held = await call("GetWorkerInfo", {});
    const { workerEpoch } = await call("ResetKvCache", { workerEpoch: info.workerEpoch });
    const result = {
      epoch: info.workerEpoch,
      outputIds,
      graphMode: answer.graph.mode,
      lastAnswer: answer,
      retriedAnswer: retried,
      leaseHolder: held.leaseHolder,
      stepsExecuted: held.counters['steps_executed_total{sequenced="true"}'],
      invalid,
      epochAfterReset: workerEpoch,
    };
    console.log(JSON.stringify(result));
  } finally {
    close();
  }
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
