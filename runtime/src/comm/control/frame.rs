//! Frames of the connection between two processes: messages, their limits, and the seal on each.
//!
//! A frame is a byte for the kind, the length of the payload in four bytes (little endian), the payload, and a
//! tag: the HMAC-SHA256 of the frame's number, head and payload. The key belongs to one direction of
//! one connection, and frames are numbered. A frame that was changed, repeated, left out or sent back
//! is therefore refused.
//!
//! The other end may be anyone: a length is compared with the limit of its kind before it is used, memory
//! grows with the bytes that arrive, and text is cut and cleaned as it is decoded.

use std::io::{self, Read};

use hmac::{Hmac, KeyInit, Mac};
use ir::plan::Plan;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::Wish;

/// One message, the payload of a frame.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Says which rank connects, to rank 0.
    Hello(Hello),
    /// Says that rank 0 has taken this rank in; the machine that rank 0 runs on.
    Joined(String),
    /// Says why rank 0 has not.
    Refused(Refusal),
    /// Says that all ranks are here.
    Go,
    /// Carries a broadcast of rank 0.
    Data(Vec<u8>),
    /// Carries the first failure of the run.
    Fail(Failure),
    /// Says where a rank was when the run failed, to rank 0.
    Position(String),
    /// Asks for something that all ranks do after one step, to rank 0.
    Wish(Wish),
    /// Says what all ranks do after this step, which none can end before rank 0 begins it.
    Plan(u64, Wish),
    /// Says that this rank knows of it, to rank 0.
    Agreed,
    /// Says on which port this rank takes connections for data, to rank 0.
    Port(u16),
    /// Shows that the sender is alive.
    Beat,
    /// Ends the messages of a rank that is done.
    Bye,
}

/// A rank's description of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The rank.
    pub rank: u64,
    /// The machine that it runs on.
    pub host: String,
    /// The facts that must be the same on all ranks: names and values.
    pub facts: Vec<(String, String)>,
    /// The error of a rank that cannot run, and comes to say so.
    pub failed: Option<Failure>,
}

/// The answer of rank 0 to a rank that it does not take in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Refusal {
    /// All ranks of the run are here.
    Complete,
    /// The two ranks do not fit together.
    Differs {
        /// `` rank 3 (node7) and rank 0 (node1) differ ``.
        who: String,
        /// `` plan is 6f12 and 8a03 ``.
        differences: Vec<String>,
    },
}

/// A failure as other processes hear of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// The code of the error.
    pub code: String,
    /// The message of the error, which names the rank.
    pub message: String,
    /// True if it is our mistake.
    pub bug: bool,
}

/// The end of a connection that sends: rank 0, or another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// Rank 0.
    First,
    /// Another rank.
    Other,
}

/// The most bytes that a message may have.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a broadcast.
    pub data: usize,
}

const HELLO: u8 = 1;
const JOINED: u8 = 2;
const REFUSED: u8 = 3;
const GO: u8 = 4;
const DATA: u8 = 5;
const FAIL: u8 = 6;
const POSITION: u8 = 7;
const BEAT: u8 = 8;
const BYE: u8 = 9;
const WISH: u8 = 10;
const PLAN: u8 = 11;
const AGREED: u8 = 12;
const PORT: u8 = 13;

/// Bytes of a wish: 0 to save, else the signal that stops.
const WISH_LEN: usize = 1;

/// Bytes of a step and a wish.
const PLAN_LEN: usize = 8 + WISH_LEN;

/// Bytes of a port.
const PORT_LEN: usize = 2;

/// Bytes of a kind and a length.
pub const HEAD: usize = 5;

/// Bytes of a tag.
pub const TAG: usize = 32;

/// The most bytes of the name of a machine.
const NAME_MAX: usize = 256;

/// The most bytes of a text that people read.
const TEXT_MAX: usize = 8 << 10;

/// The most differences between two ranks that are told, and bytes of each.
const DIFFERENCES_MAX: (usize, usize) = (16, 512);

/// The most facts of a rank, and bytes of each name and value.
const FACTS_MAX: (usize, usize) = (32, 128);

/// More ranks than any run has.
const RANKS_MAX: usize = 1 << 20;

/// The most bytes of a message in JSON. Cleaned text doubles at most when it is quoted.
const JSON_MAX: usize = 32 << 10;

impl Limits {
    /// The limits for the ranks of a plan.
    ///
    /// The largest broadcasts have an algorithm of 64 bytes for each GEMM that differs, of which an instruction has a few,
    /// or an address for each rank.
    pub fn of(plan: &Plan) -> Limits {
        let instructions: usize = plan.sections.iter().map(Vec::len).sum();
        let sizes = plan.mesh.axes.iter().map(|it| it.size as usize);
        let ranks = sizes.fold(1, usize::saturating_mul);
        Limits { data: (64 << 10) + instructions * 1024 + ranks.min(RANKS_MAX) * 64 }
    }

    /// The length of the payload that a frame with this head has. `InvalidData` is a kind that this sender does
    /// not send, or a length that the kind never has.
    pub fn length(&self, head: [u8; HEAD], sender: Sender) -> io::Result<usize> {
        let [kind, length @ ..] = head;
        let max = match (kind, sender) {
            (HELLO, Sender::Other) => JSON_MAX,
            (POSITION, Sender::Other) => TEXT_MAX,
            (JOINED, Sender::First) => NAME_MAX,
            (REFUSED, Sender::First) => JSON_MAX,
            (GO, Sender::First) => 0,
            (DATA, Sender::First) => self.data,
            (FAIL, _) => JSON_MAX,
            (WISH, Sender::Other) => WISH_LEN,
            (PLAN, Sender::First) => PLAN_LEN,
            (AGREED, Sender::Other) => 0,
            (PORT, Sender::Other) => PORT_LEN,
            (BEAT | BYE, _) => 0,
            _ => return Err(invalid()),
        };
        let length = u32::from_le_bytes(length) as usize;
        if length <= max { Ok(length) } else { Err(invalid()) }
    }
}

impl Message {
    /// The kind and the payload. Text is cut and cleaned, so that it is within the limits of the other end.
    pub fn encode(&self) -> (u8, Vec<u8>) {
        let json = |kind: u8, it: Result<Vec<u8>, serde_json::Error>| {
            (kind, it.expect("strings and numbers are JSON"))
        };
        match self {
            Message::Hello(it) => json(HELLO, serde_json::to_vec(&it.clone().clean())),
            Message::Joined(host) => (JOINED, shown(host, NAME_MAX).into_bytes()),
            Message::Refused(it) => json(REFUSED, serde_json::to_vec(&it.clone().clean())),
            Message::Go => (GO, Vec::new()),
            Message::Data(bytes) => (DATA, bytes.clone()),
            Message::Fail(it) => json(FAIL, serde_json::to_vec(&it.clone().clean())),
            Message::Position(text) => (POSITION, shown(text, TEXT_MAX).into_bytes()),
            Message::Wish(it) => (WISH, vec![it.to_byte()]),
            Message::Plan(step, it) => (PLAN, [&step.to_le_bytes()[..], &[it.to_byte()]].concat()),
            Message::Agreed => (AGREED, Vec::new()),
            Message::Port(port) => (PORT, port.to_le_bytes().to_vec()),
            Message::Beat => (BEAT, Vec::new()),
            Message::Bye => (BYE, Vec::new()),
        }
    }

    /// The message of a payload; `InvalidData` for what is none.
    pub fn decode(kind: u8, payload: Vec<u8>) -> io::Result<Message> {
        let text = |max: usize| shown(&String::from_utf8_lossy(&payload), max);
        Ok(match kind {
            HELLO => {
                let hello = serde_json::from_slice::<Hello>(&payload)?;
                hello.failed.iter().try_for_each(Failure::check)?;
                Message::Hello(hello.clean())
            }
            JOINED => Message::Joined(text(NAME_MAX)),
            REFUSED => Message::Refused(serde_json::from_slice::<Refusal>(&payload)?.clean()),
            GO => Message::Go,
            DATA => Message::Data(payload),
            FAIL => {
                let failure = serde_json::from_slice::<Failure>(&payload)?;
                failure.check()?;
                Message::Fail(failure.clean())
            }
            POSITION => Message::Position(text(TEXT_MAX)),
            WISH => match payload[..] {
                [wish] => Message::Wish(Wish::from_byte(wish)),
                _ => return Err(invalid()),
            },
            PLAN => match payload.split_last_chunk() {
                Some((step, [wish])) => {
                    let step = step.try_into().map_err(|_| invalid())?;
                    Message::Plan(u64::from_le_bytes(step), Wish::from_byte(*wish))
                }
                None => return Err(invalid()),
            },
            AGREED => Message::Agreed,
            PORT => Message::Port(u16::from_le_bytes(payload.try_into().map_err(|_| invalid())?)),
            BEAT => Message::Beat,
            BYE => Message::Bye,
            _ => return Err(invalid()),
        })
    }
}

impl Wish {
    fn to_byte(self) -> u8 {
        match self {
            Wish::Save => 0,
            Wish::Stop(signal) => signal,
        }
    }

    fn from_byte(byte: u8) -> Wish {
        match byte {
            0 => Wish::Save,
            signal => Wish::Stop(signal),
        }
    }
}

impl Hello {
    fn clean(self) -> Hello {
        let (most, max) = FACTS_MAX;
        let facts = self.facts.iter().take(most);
        let facts = facts.map(|(name, value)| (shown(name, max), shown(value, max))).collect();
        let failed = self.failed.map(Failure::clean);
        Hello { rank: self.rank, host: shown(&self.host, NAME_MAX), facts, failed }
    }
}

impl Refusal {
    fn clean(self) -> Refusal {
        match self {
            Refusal::Complete => Refusal::Complete,
            Refusal::Differs { who, differences } => {
                let (most, max) = DIFFERENCES_MAX;
                let differences = differences.iter().take(most).map(|it| shown(it, max));
                Refusal::Differs { who: shown(&who, 2 * max), differences: differences.collect() }
            }
        }
    }
}

impl Failure {
    /// `InvalidData`, unless the code looks as ours do.
    fn check(&self) -> io::Result<()> {
        let number = self.code.strip_prefix("PL").ok_or_else(invalid)?;
        let is_code = number.len() == 4 && number.bytes().all(|it| it.is_ascii_digit());
        if is_code { Ok(()) } else { Err(invalid()) }
    }

    fn clean(self) -> Failure {
        Failure { message: shown(&self.message, TEXT_MAX), ..self }
    }
}

/// Text of another process as a terminal may show it: on one line, without characters that a terminal obeys
/// or that change how others are shown, and of at most `max` bytes.
///
/// ```text
/// node\x1b[2J7  ->  node\u{1b}[2J7
/// ```
pub fn shown(text: &str, max: usize) -> String {
    let hidden = |it: char| {
        it.is_control()
            || matches!(it, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let (mut res, mut piece) = (String::new(), String::new());
    for it in text.chars() {
        piece.clear();
        match hidden(it) {
            true => piece.extend(it.escape_default()),
            false => piece.push(it),
        }
        if res.len() + piece.len() > max.saturating_sub(CUT.len()) {
            // What is left may fit, and needs no mark then.
            return match text.len() <= max && !text.chars().any(hidden) {
                true => text.to_string(),
                false => res + CUT,
            };
        }
        res.push_str(&piece);
    }
    res
}

/// Stands for what is left out.
const CUT: &str = " ..";

/// The seal of one direction of a connection.
#[derive(Clone)]
pub struct Seal {
    mac: Hmac<Sha256>,
    /// The number of the next frame.
    next: u64,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seal({})", self.next)
    }
}

impl Seal {
    /// A seal that nothing was sent under.
    pub fn new(key: [u8; 32]) -> Seal {
        Seal { mac: Hmac::new_from_slice(&key).expect("any length is a key"), next: 0 }
    }

    /// The next frame.
    pub fn frame(&mut self, message: &Message) -> Vec<u8> {
        let (kind, payload) = message.encode();
        let mut res = Vec::with_capacity(HEAD + payload.len() + TAG);
        res.push(kind);
        res.extend(u32::try_from(payload.len()).expect("messages are short").to_le_bytes());
        res.extend(payload);
        let tag = self.mac().chain_update(&res).finalize().into_bytes();
        res.extend(tag);
        res
    }

    /// The tag of the next frame, before its bytes are added.
    pub(crate) fn mac(&mut self) -> Hmac<Sha256> {
        let mac = self.mac.clone().chain_update(self.next.to_le_bytes());
        self.next += 1;
        mac
    }
}

/// Reads the frames of one direction of a connection.
#[derive(Debug, Clone)]
pub struct Frames {
    seal: Seal,
    sender: Sender,
    limits: Limits,
}

impl Frames {
    /// Frames that `sender` sealed.
    pub fn new(seal: Seal, sender: Sender, limits: Limits) -> Frames {
        Frames { seal, sender, limits }
    }

    /// The seal of all that comes after the frames that were read.
    pub(crate) fn into_seal(self) -> Seal {
        self.seal
    }

    /// Returns the bytes of a frame that starts like this, or those of a head while the head is not complete.
    pub fn needs(&self, start: &[u8]) -> io::Result<usize> {
        match start.first_chunk() {
            Some(&head) => Ok(HEAD + self.limits.length(head, self.sender)? + TAG),
            None => Ok(HEAD),
        }
    }

    /// The message of a whole frame, which is the next.
    pub fn open(&mut self, mut frame: Vec<u8>) -> io::Result<Message> {
        let tag = frame.split_off(frame.len().checked_sub(TAG).ok_or_else(invalid)?);
        self.seal.mac().chain_update(&frame).verify_slice(&tag).map_err(|_| invalid())?;
        let kind = *frame.first().ok_or_else(invalid)?;
        let payload = frame.get(HEAD..).ok_or_else(invalid)?.to_vec();
        Message::decode(kind, payload)
    }

    /// Reads the next message.
    pub fn read(&mut self, stream: &mut impl Read) -> io::Result<Message> {
        let mut frame = Vec::new();
        loop {
            let needed = self.needs(&frame)?;
            if frame.len() == needed {
                return self.open(frame);
            }
            let missing = (needed - frame.len()) as u64;
            if stream.by_ref().take(missing).read_to_end(&mut frame)? < missing as usize {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it sent what is no message of planc")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { data: 100 };

    fn ends(sender: Sender) -> (Seal, Frames) {
        let seal = Seal::new([7; 32]);
        (seal.clone(), Frames::new(seal, sender, LIMITS))
    }

    #[test]
    fn wishes_come_as_they_were_sent() {
        let (mut seal, mut frames) = ends(Sender::Other);
        for it in [Message::Wish(Wish::Stop(2)), Message::Wish(Wish::Save), Message::Agreed] {
            let bytes = seal.frame(&it);
            assert_eq!(frames.read(&mut &bytes[..]).expect("it was sealed"), it);
        }
        // Of another length, or from the other end, they are none.
        for (kind, payload) in [(WISH, vec![]), (PLAN, vec![0; 8]), (PLAN, vec![0; 10])] {
            assert!(Message::decode(kind, payload).is_err(), "{kind}");
        }
        let plan = seal.frame(&Message::Plan(1, Wish::Save));
        assert!(frames.read(&mut &plan[..]).is_err());
    }

    #[test]
    fn messages_come_as_they_were_sent() {
        let (mut seal, mut frames) = ends(Sender::First);
        let refusal = Refusal::Differs { who: "a".to_string(), differences: vec!["b".to_string()] };
        let failure = Failure { code: "PL0508".to_string(), message: "x".to_string(), bug: false };
        let messages = [
            Message::Joined("node1".to_string()),
            Message::Refused(refusal),
            Message::Refused(Refusal::Complete),
            Message::Go,
            Message::Data(vec![1; 100]),
            Message::Fail(failure),
            Message::Plan(1 << 40, Wish::Stop(15)),
            Message::Plan(7, Wish::Save),
            Message::Beat,
            Message::Bye,
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(|it| seal.frame(it)).collect();
        let mut bytes = &bytes[..];
        for it in messages {
            assert_eq!(frames.read(&mut bytes).expect("it was sealed"), it);
        }
        assert!(bytes.is_empty());
    }

    /// A frame again, one left out, one with a bit flipped, one of another connection, one of the other direction.
    #[test]
    fn frames_that_were_touched_are_refused() {
        let (mut seal, frames) = ends(Sender::First);
        let [first, second] = [(); 2].map(|()| seal.frame(&Message::Data(vec![5])));
        let check = |bytes: Vec<u8>, good: usize| {
            let (mut frames, mut bytes) = (frames.clone(), &bytes[..]);
            for _ in 0..good {
                frames.read(&mut bytes).expect("it was not touched");
            }
            let error = frames.read(&mut bytes).expect_err("it was");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        };
        check([&first[..], &first].concat(), 1);
        check(second, 0);
        for at in HEAD..first.len() {
            let mut flipped = first.clone();
            flipped[at] ^= 1;
            check(flipped, 0);
        }
        check(Seal::new([8; 32]).frame(&Message::Go), 0);
        check(Seal::new([7; 32]).frame(&Message::Position("of a rank".to_string())), 0);
    }

    /// The limit is that of the kind, and holds before any memory is taken.
    #[test]
    fn lengths_beyond_a_limit_are_refused_by_their_head() {
        let check = |sender, kind: u8, max: u32| {
            let head = |length: u32| {
                let [a, b, c, d] = length.to_le_bytes();
                LIMITS.length([kind, a, b, c, d], sender).is_ok()
            };
            assert!(head(max) && !head(max + 1) && !head(u32::MAX), "{sender:?} {kind}");
        };
        check(Sender::First, DATA, 100);
        check(Sender::First, GO, 0);
        check(Sender::Other, HELLO, JSON_MAX as u32);
        check(Sender::Other, FAIL, JSON_MAX as u32);
        let nothing = |kind, sender| LIMITS.length([kind, 0, 0, 0, 0], sender).is_err();
        assert!(nothing(DATA, Sender::Other), "only rank 0 broadcasts");
        assert!(nothing(HELLO, Sender::First) && nothing(0, Sender::First));
    }

    #[test]
    fn text_of_others_is_cleaned_and_cut() {
        let check = |text: &str, max: usize, expect: &str| assert_eq!(shown(text, max), expect);
        check("node-7.cluster", 256, "node-7.cluster");
        check("a\x1b[2J\r\nb\u{202e}c", 256, "a\\u{1b}[2J\\r\\nb\\u{202e}c");
        check("four", 4, "four");
        check("fifth one", 8, "fifth ..");
        check("ääää", 8, "ääää");
        check("äääää", 8, "ää ..");
        check("\x1b\x1b", 9, "\\u{1b} ..");
        let long =
            Failure { code: "PL0508".to_string(), message: "\"\x1b".repeat(1 << 20), bug: false };
        let (kind, payload) = Message::Fail(long).encode();
        let decoded = Message::decode(kind, payload.clone()).expect("it is cut, and whole");
        assert!(payload.len() <= JSON_MAX && matches!(decoded, Message::Fail(_)));
    }

    #[test]
    fn a_failure_has_a_code_of_ours() {
        for code in ["", "PL", "PL12345", "PL\x1b[2J", "E0001"] {
            let failure = Failure { code: code.to_string(), message: String::new(), bug: false };
            let (kind, payload) = Message::Fail(failure).encode();
            assert!(Message::decode(kind, payload).is_err(), "{code:?}");
        }
    }
}
