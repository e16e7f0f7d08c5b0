// The report: one text that was read, without a server.

import { byId } from "./dom.js";
import { Trace } from "./trace.js";
import { Reading } from "./reading.js";

const trace = new Trace();
trace.add(JSON.parse(byId("trace").textContent));
const reading = new Reading(trace, () => document.title);
byId("main").append(reading.element);
