//! The map of the flat spaces: every block, its shards, and who computes what.

use std::cmp::Reverse;

use polarshard_partition::{Block, BlockId, Plan, Rank, Run, Source, Span};

use super::canvas::{Anchor, Canvas, FAINT, INK};
use crate::table::grouped;

const WIDTH: f64 = 980.0;
const LEFT: f64 = 24.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 84.0;
/// From one block's bar to the next.
const PITCH: f64 = 72.0;
/// The thin bar that tells a shard's owner, and the bar of what lies in it.
const OWNER: f64 = 6.0;
const BAR: f64 = 30.0;
/// The width of a character of a label, nearly.
const CHARACTER: f64 = 6.0;

/// Ranks beyond these take the colours again from the first on.
const COLOURS: [&str; 8] = [
    "#4e9fd1", "#f0a24a", "#62b57a", "#d9788f", "#9a86cf", "#b98e6b", "#5fc0bd", "#b5b34b",
];

/// The layout of a plan. A bar is a block; over it, in the owners' colours, its shards; in it the parameters' runs, in
/// the colour of the rank that computes their update.
pub(crate) fn layout(plan: &Plan) -> String {
    let blocks = plan.layout().blocks().len();
    let mut canvas = Canvas::new(WIDTH, TOP + PITCH * blocks as f64 + 8.0);
    head(&mut canvas, plan);
    for (index, id) in plan.layout().block_ids().enumerate() {
        Row::new(plan, id, TOP + PITCH * index as f64).draw(&mut canvas);
    }
    canvas.finish()
}

fn head(canvas: &mut Canvas, plan: &Plan) {
    let (layout, route, policy) = (plan.layout(), plan.route(), plan.policy());
    let title = format!(
        "Layout: placement {}, route {route}, policy {policy}",
        layout.placement()
    );
    canvas.text(LEFT, 30.0, Anchor::Start, 16.0, INK, title);
    let mut x = LEFT;
    for rank in layout.world().ranks() {
        canvas.rect(
            (x, 44.0),
            (12.0, 12.0),
            &format!(r#"fill="{}""#, colour(rank)),
            "",
        );
        canvas.text(
            x + 17.0,
            54.0,
            Anchor::Start,
            12.0,
            INK,
            format_args!("rank {rank}"),
        );
        x += 66.0;
    }
    canvas.rect(
        (x, 44.0),
        (12.0, 12.0),
        &format!(r#"fill="url(#padding)" stroke="{FAINT}""#),
        "",
    );
    canvas.text(x + 17.0, 54.0, Anchor::Start, 12.0, INK, "padding");
    let meaning = "thin bar: owner of the shard; thick bar: rank that computes the update";
    canvas.text(RIGHT, 54.0, Anchor::End, 12.0, FAINT, meaning);
}

/// A part of a run.
struct Piece {
    /// Where it lies in the block.
    span: Span,
    /// Its first element, in the parameter.
    start: usize,
    owner: Rank,
    /// The rank that computes its update.
    computer: Rank,
}

/// One block on the sheet.
struct Row<'a> {
    plan: &'a Plan,
    id: BlockId,
    block: &'a Block,
    top: f64,
}

impl<'a> Row<'a> {
    fn new(plan: &'a Plan, id: BlockId, top: f64) -> Self {
        Self {
            plan,
            id,
            block: plan.layout().block(id),
            top,
        }
    }

    fn draw(&self, canvas: &mut Canvas) {
        let group = self.plan.layout().space(self.block.space).group;
        let (shard, world) = (self.block.shard_len, self.plan.layout().world());
        let elems = grouped((world.get() * shard) as u64);
        let label = format!(
            "block {}, {group}: {elems} elements, {} a shard",
            self.id.index(),
            grouped(shard as u64)
        );
        canvas.text(LEFT, self.top, Anchor::Start, 12.0, INK, label);
        for rank in world.ranks() {
            let span = self.plan.layout().shard_span(self.id, rank);
            self.rect(
                canvas,
                span,
                (8.0, OWNER),
                &format!(r#"fill="{}""#, colour(rank)),
                "",
            );
        }
        for run in &self.block.runs {
            match run.source {
                Some(source) => self.parameter(canvas, run, source),
                None => self.padding(canvas, run),
            }
        }
        for rank in world.ranks().skip(1) {
            let x = self.x(rank.0 * shard);
            let (from, to) = ((x, self.top + 8.0), (x, self.top + 18.0 + BAR));
            canvas.line(from, to, &format!(r#"stroke="{INK}" stroke-width="1.5""#));
        }
    }

    fn parameter(&self, canvas: &mut Canvas, run: &Run, source: Source) {
        let param = self.plan.params().get(source.param);
        let pieces = self.pieces(run, source);
        for Piece {
            span,
            start,
            owner,
            computer,
        } in &pieces
        {
            let in_param = Span::of_len(*start, span.len());
            let hint = format!(
                "{} {in_param}: owned by rank {owner}, computed by rank {computer}",
                param.name
            );
            let style = format!(r#"fill="{}" fill-opacity="0.55""#, colour(*computer));
            self.rect(canvas, *span, (16.0, BAR), &style, &hint);
        }
        // Where one matrix or parameter ends and the next begins; a cut between shards is drawn over it.
        for piece in &pieces {
            self.border(canvas, piece.span.end, 1.0);
        }
        self.border(canvas, run.at + run.len, 2.5);
        // In the widest part that no cut goes through.
        let world = self.plan.layout().world();
        let shards = world.ranks().filter_map(|rank| {
            run.span()
                .intersect(self.plan.layout().shard_span(self.id, rank))
        });
        let Some(widest) = shards.min_by_key(|part| Reverse(part.len())) else {
            return;
        };
        let (left, right) = (self.x(widest.start), self.x(widest.end));
        if let Some(name) = fitting(&param.name, right - left) {
            canvas.text(
                (left + right) / 2.0,
                self.top + 35.0,
                Anchor::Middle,
                11.0,
                INK,
                name,
            );
        }
    }

    fn border(&self, canvas: &mut Canvas, elem: usize, width: f64) {
        let x = self.x(elem);
        let style = format!(r##"stroke="#fff" stroke-width="{width}""##);
        canvas.line((x, self.top + 16.0), (x, self.top + 16.0 + BAR), &style);
    }

    fn padding(&self, canvas: &mut Canvas, run: &Run) {
        let hint = format!("{} elements of padding", run.len);
        self.rect(
            canvas,
            run.span(),
            (16.0, BAR),
            r#"fill="url(#padding)""#,
            &hint,
        );
    }

    /// A run in pieces of one matrix and one shard each. What is in no matrix is computed by its owner, as is what every
    /// owner computes for itself.
    fn pieces(&self, run: &Run, source: Source) -> Vec<Piece> {
        let (params, layout) = (self.plan.params(), self.plan.layout());
        let mut pieces = Vec::new();
        for owner in layout.world().ranks() {
            let Some(owned) = run.span().intersect(layout.shard_span(self.id, owner)) else {
                continue;
            };
            let in_param = Span::of_len(source.start + owned.start - run.at, owned.len());
            let mut push = |part: Span, computer| {
                let span = Span::of_len(run.at + part.start - source.start, part.len());
                pieces.push(Piece {
                    span,
                    start: part.start,
                    owner,
                    computer,
                });
            };
            let mut matrices = params.matrices_of(source.param).peekable();
            if matrices.peek().is_none() {
                push(in_param, owner);
            }
            for matrix in matrices {
                if let Some(part) = params.matrix(matrix).1.span.intersect(in_param) {
                    push(part, self.plan.compute_owner(matrix).unwrap_or(owner));
                }
            }
        }
        pieces
    }

    fn rect(
        &self,
        canvas: &mut Canvas,
        span: Span,
        (below, height): (f64, f64),
        style: &str,
        hint: &str,
    ) {
        let (left, right) = (self.x(span.start), self.x(span.end));
        canvas.rect(
            (left, self.top + below),
            (right - left, height),
            style,
            hint,
        );
    }

    /// Each block is drawn to the full width.
    fn x(&self, elem: usize) -> f64 {
        let elems = self.plan.layout().world().get() * self.block.shard_len;
        LEFT + (RIGHT - LEFT) * elem as f64 / elems as f64
    }
}

fn colour(rank: Rank) -> &'static str {
    COLOURS[rank.0 % COLOURS.len()]
}

/// As much of a name as fits: without `weight`, which says nothing, and then the last parts of it.
fn fitting(name: &str, width: f64) -> Option<&str> {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    let starts = [0]
        .into_iter()
        .chain(name.match_indices('.').map(|(at, _)| at + 1));
    let mut tails = starts.map(|start| &name[start..]);
    tails.find(|tail| CHARACTER * tail.len() as f64 + 4.0 <= width)
}
